"""What the commands do. `offbeat.app.cli` describes their options, and imports this only to run one."""
