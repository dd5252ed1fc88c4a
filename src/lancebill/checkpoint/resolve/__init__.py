"""From headers to meaning: tensor names, families, formats; what each expert is made of and what is missing."""
