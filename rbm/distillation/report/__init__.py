"""``report.html`` of a run: observe.py looks at its models, page.py makes sections, write.py the file."""

# The page, and the figures of it that need the models.
REPORT, OBSERVED = "report.html", "report.json"
