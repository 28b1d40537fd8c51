"""The APIs that clients speak: what their requests say, and how their answers are written."""
