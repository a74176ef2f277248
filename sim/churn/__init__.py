"""Who is there when: sessions and absences, waves, crowds and failures that take many along."""
