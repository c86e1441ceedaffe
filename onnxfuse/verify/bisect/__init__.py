"""Finding what makes outputs disagree: `search` over sites, `regions` between two files, `precision` over nodes, `repro` in small."""
