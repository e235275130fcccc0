"""The aggregator's decisions: who is asked, when a round closes and why, and how a run goes on after a crash."""
