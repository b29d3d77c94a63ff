"""Benchmarks: speed and label quality, measured, never asserted in a test."""
