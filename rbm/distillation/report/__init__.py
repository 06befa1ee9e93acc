"""``report.html`` of a run: observe.py looks at its models, page.py makes sections, write.py the file."""

# The page, and the figures of it that need the models.
REPORT, OBSERVED = "report.html", "report.json"
# The plots, which are not on the page.
CURVES, LOAD, REPRESENTATION = "training.png", "expert_load.png", "representation.png"
FILES = (REPORT, OBSERVED, CURVES, LOAD, REPRESENTATION)
