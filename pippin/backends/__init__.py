"""Backends own arrays: they load a shard and run steps. Nothing above imports MLX or torch."""
