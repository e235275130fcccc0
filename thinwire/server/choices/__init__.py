"""Who is asked, for what, in which codec and until when: pure decisions from what is known of devices."""
