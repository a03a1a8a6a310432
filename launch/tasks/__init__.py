"""Groups of fab tasks: parse, call launch, print. No logic; fabfile.py puts them together."""
