// A link may carry its code behind "#", where no server and no log sees it.
const form = document.querySelector("form");
const code = decodeURIComponent(location.hash.slice(1));
if (code && !document.querySelector("#said").textContent) {
  history.replaceState(null, "", location.pathname + location.search);
  form.querySelector("#code").value = code;
  form.requestSubmit();
}
