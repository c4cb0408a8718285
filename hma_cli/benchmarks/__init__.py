"""Measurements, always as ratios within one run: machines are noisy."""
