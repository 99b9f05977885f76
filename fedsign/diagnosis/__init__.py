"""Diagnosis: likely mistakes in the data and in the course of a run, each with the setting that helps."""
