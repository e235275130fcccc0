// A page's address holds what is chosen on it, so that a reload or a link shows the same.
import { useState } from "./dom.js";

export function useQuery(name, otherwise) {
  const [value, setValue] = useState(new URLSearchParams(location.search).get(name) ?? otherwise);
  const choose = (next) => {
    const query = new URLSearchParams(location.search);
    if (next === otherwise || next === null) query.delete(name);
    else query.set(name, next);
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    setValue(next ?? otherwise);
  };
  return [value, choose];
}

/** Whether a section shows its table. */
export function useTable(section) {
  const [shown, choose] = useQuery(section, "chart");
  return [shown === "table", (on) => choose(on ? "table" : "chart")];
}
