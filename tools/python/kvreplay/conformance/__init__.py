"""`kvreplay check`: kept positions of an inference engine against those of the same policy on the same trace."""

KEPT_SUFFIXES = (".safetensors", ".npz")
