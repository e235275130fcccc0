// What a run's page knows: a whole view, and the views after it that carry only what has changed.
const SHOWN_ROUNDS = 60; // newest rounds that are kept
const MAX_POINTS = 800; // of a curve, until a thinner one is read

/** The address of the next view, after `old`, with the chosen round (0: the one that takes replies); `clients` names a page of them. */
export const address = (id, old, round, clients) => {
  const since = !old || Math.max(old.points.length, old.spent.length) > MAX_POINTS ? 0 : old.change;
  const held = old?.round?.round ?? 0;
  return `runs/${id}/view?since=${since}&round=${round}&held=${held}${clients === null ? "" : `&${clients}`}`;
};

export const merge = (old, view) => {
  const run = { ...old?.run, ...view.about, ...view.run };
  const clients = view.clients ?? old?.clients;
  const worst = view.worst ?? old?.worst;
  if (view.whole || !old) return { ...view, run, clients, worst };
  const round = !view.round || view.round.whole ? view.round : { ...view.round, updates: put(old.round.updates, view.round.updates, (u) => u.assignment_id, byDevice) };
  const rounds = put(old.rounds, view.rounds, (r) => r.round, byRound).slice(-SHOWN_ROUNDS);
  const points = put(old.points, view.rounds.filter((r) => Object.keys(r.metrics).length), (r) => r.round, byRound);
  const spent = put(old.spent, view.rounds.filter((r) => r.epsilon_run !== null), (r) => r.round, byRound);
  return { ...view, run, clients, worst, round, rounds, points, spent };
};

const byRound = (a, b) => a.round - b.round;
const byDevice = (a, b) => (a.device < b.device ? -1 : a.device > b.device ? 1 : (a.assigned_at ?? 0) - (b.assigned_at ?? 0));

/** `old` with these rows in the place of those of the same key; the same array where there are none. */
const put = (old, rows, key, order) => {
  if (!rows.length) return old;
  const found = new Map(old.map((row) => [key(row), row]));
  for (const row of rows) found.set(key(row), row);
  return [...found.values()].sort(order);
};
