"""Decoders side by side in one run: plain, speculative, and transformers' own."""
