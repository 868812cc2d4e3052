"""Cost models as they are saved: networks of one machine or several, overhead, links, provenance.

A roofline model stands in for machines that nobody measured.
"""
