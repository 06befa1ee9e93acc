"""``report.html`` of a run: observe.py looks at its models, page.py makes sections, write.py the file."""

REPORT = "report.html"
