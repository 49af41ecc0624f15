"""``specdec serve``: an HTTP server with OpenAI's interface, over one engine."""
