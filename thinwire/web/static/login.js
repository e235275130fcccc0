// A link may carry its code behind "#", where no server and no log sees it.
const form = document.getElementById("by-code");

const enter = () => {
  const code = decodeURIComponent(location.hash.slice(1));
  if (!code) return;
  history.replaceState(null, "", location.pathname + location.search);
  form.querySelector("#code").value = code;
  form.requestSubmit();
};

addEventListener("hashchange", enter); // the link opened where this page stands already
enter();
