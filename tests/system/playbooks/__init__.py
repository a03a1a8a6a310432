"""The playbooks on real hosts: bare Debian with systemd, an account with sudo, and a package mirror of their own."""
