"""Modules that own parameters and call `regard.attend`: Flax NNX, Flax Linen, interop."""
