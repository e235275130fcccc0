// Runs before anything is drawn, so that the dashboard never flashes in the other theme.
(() => {
  const chosen = localStorage.getItem("thinwire-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
