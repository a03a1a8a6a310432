"""The Grafana dashboards as code; dashboards/*.json is what it writes (`python -m monitoring.boards`)."""
