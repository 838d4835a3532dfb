"""The frontend service: the HTTP APIs before one or more engines.

A request passes through these packages, in this order:

1. `http` reads it and checks key, size and load; `routes` answers what needs no tokens.
2. `openai`, `anthropic` and `responses_api` check its body; all dialects become one form of chat.
3. `templates` and `text` make the prompt and its tokens.
4. `placement` chooses an engine; `engine` sends, moves and resubmits, and gives each token once.
5. `text` makes tokens text; `parsing`, `reasoning` and `tools` take the text apart; the dialect answers.

`metrics`, `steps`, `page` and the modules here (`service` starts all, `app` joins the routes) watch and serve.
"""
