"""The recurrent-depth language model.

recurrent.py   RecurrentLM: prelude, recurrent core, coda and head, top to bottom
blocks.py      RMSNorm, rotary embedding, attention, gated MLP, the sandwich block
vocab.py       the token table: embedding, output head and their cross entropy
init.py        initial weights
state.py       the latent state a forward starts from, and its health statistics
sampler.py     how many core iterations a micro-batch runs (torch-free)
cache.py       keys and values of past tokens, one slot a core iteration
exits.py       measures that tell when further iterations change nothing
generate.py    text generation

This module imports nothing, so that the torch-free parts can be used without torch.
"""
