"""The hand-written peers in a package with bugs to plant: a worker looks for them beside a side."""
