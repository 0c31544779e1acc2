"""From a config to the parts of a run, and one step of it."""
