"""Fused optimizer kernels in Pallas. Imports jax only, never zerojax."""
