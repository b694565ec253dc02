"""Capture, matching and rewriting: everything that touches FX graphs."""
