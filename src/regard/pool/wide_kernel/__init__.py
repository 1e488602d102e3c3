"""Pallas kernels for wide features: softmax pooling whose scores are inner products of any width.

    forward.py   online softmax over tiles (Triton lowering, Ampere and later)
    hopper.py    the same for Hopper GPUs (Mosaic GPU lowering)
    d_scores.py  the way back to the scores
    wide_pass.py pads, picks, and turns d scores into d features
"""
