"""What the Grafana boards show, one module a board. `tools/generate_dashboards.py` makes their JSON.

Every expression is written here once; the contract tests compare the metrics in it with those that the code declares.
"""
