"""Churn: sessions and absences, waves, flash crowds and failures that hit many peers at once."""
