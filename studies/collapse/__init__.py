"""Trainings that break, and what came before."""
