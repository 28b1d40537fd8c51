"""Speaks to a server of OpenAI's API over HTTP, such as `edge-run serve`; needs no extra."""
