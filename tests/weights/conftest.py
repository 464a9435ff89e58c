"""Keeps doctest from importing what wants PyTorch."""

collect_ignore = ["make_golden.py"]
