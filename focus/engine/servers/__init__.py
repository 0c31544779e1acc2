"""Engines behind HTTP: a fleet of SGLang servers, and a server of ours that speaks as they do."""
