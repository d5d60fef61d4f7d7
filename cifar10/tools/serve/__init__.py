"""Answers over HTTP what is on images."""
