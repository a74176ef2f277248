"""Churn: sessions and absences, waves, crowds and failures that take many peers along."""
