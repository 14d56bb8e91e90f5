"""Trainings killed at random instants, and long trainings."""
