"""What is lost, doubled or changed when something breaks in a run of real processes, and how soon it goes on."""
