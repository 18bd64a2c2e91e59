"""Tests on several ranks; what runs on the ranks is in the modules `checks_*`."""
