"""Both halves of the Flower app: Thinwire's, with the plan beside this file."""

from pathlib import Path

from thinwire.flower.stock_apps import client_app, server_app

server = server_app(Path(__file__).with_name("plan.toml"))
client = client_app()
