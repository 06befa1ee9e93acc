"""From a run folder to production: predictions over files, students as one file, and how long either takes."""
