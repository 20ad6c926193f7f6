"""The report of a run: one HTML file without links to others, with plots in inline SVG (docs/report.md)."""
