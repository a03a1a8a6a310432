"""Real hosts on one machine: systemd, sshd, a network and a disk of their own each (systemd-nspawn). Needs root."""
