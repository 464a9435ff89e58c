"""Starting a run on one process or on many."""
