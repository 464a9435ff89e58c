"""From a configuration file to the objects of a run."""
