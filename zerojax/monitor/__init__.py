"""What a run tells while it runs: rows in files for programs, a line in the terminal for people."""

from zerojax.monitor.logs import RunLogs as RunLogs
