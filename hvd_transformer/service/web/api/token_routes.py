"""The API of tokens, and how browsers log in and out with one."""

from starlette.responses import JSONResponse, Response

from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.api.routes import BASE, Call, Route


def me(call: Call) -> models.Me:
    return models.Me(
        owner=call.user.owner,
        role=call.user.role,
        version=call.service.version,
        queue=call.service.queue is not None,
        csrf=call.user.csrf,
        events=str(call.events.now()),
    )


def log_in(call: Call) -> Response:
    cookie = call.authentication.log_in(call.request, call.body.token)
    return JSONResponse({}, headers={"Set-Cookie": cookie})


def log_out(call: Call) -> Response:
    return JSONResponse({}, headers={"Set-Cookie": call.authentication.log_out(call.request)})


def list_tokens(call: Call) -> models.TokenList:
    return models.TokenList(items=[models.Token(**vars(token)) for token in call.service.tokens.list()])


def add_token(call: Call) -> models.Secret:
    body: models.NewToken = call.body
    secret = call.service.tokens.add(body.name, body.owner, body.role, body.expires)
    return models.Secret(token=secret)


def revoke_token(call: Call) -> None:
    call.service.tokens.revoke(call.number)


ROUTES = [
    Route("GET", f"{BASE}/me", Role.VIEW, me, "Who the client is.", models.Me),
    Route("GET", f"{BASE}/tokens", Role.ADMIN, list_tokens, "Tokens, without their secrets.", models.TokenList),
    Route(
        "POST",
        f"{BASE}/tokens",
        Role.ADMIN,
        add_token,
        "Make a token.",
        models.Secret,
        body=models.NewToken,
        status=201,
    ),
    Route("DELETE", f"{BASE}/tokens/{{id}}", Role.ADMIN, revoke_token, "Revoke a token.", status=204, refused=404),
    Route(
        "POST", "/login", None, log_in, "Begin a browser's session: sets a cookie.", models.Nothing, body=models.Login
    ),
    Route("POST", "/logout", Role.VIEW, log_out, "End a browser's session.", models.Nothing, body=models.Nothing),
]
