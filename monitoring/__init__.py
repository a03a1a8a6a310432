"""Prometheus rules, Alertmanager, Grafana dashboards and what nodes report: docs/monitoring.md."""
