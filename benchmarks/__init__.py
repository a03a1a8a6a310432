"""Scripts that compare with named peers in one run and print ratios; not tests, since a busy machine disturbs them."""
