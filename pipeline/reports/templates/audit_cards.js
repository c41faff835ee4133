// What is shown: tabs, filter, order, the cards of one page, keys.
const PAGE = 48;
let issue = D.issues[0] || {id: '', title: '', why: '', cards: [], notes: [], place: new Map(), partner: new Map()};
let view = [];  // cards that fit the filter, in order
let at = 0;  // the focused place in view
const lower = [];  // names for the filter, made when first needed

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

// -- tabs, filter and order -------------------------------------------------------------------------

function tabs() {
  by('tabs').replaceChildren(...D.issues.map(one => {
    const button = element('button', '', one.title + ' (' + one.cards.length + ')');
    button.setAttribute('role', 'tab');
    button.setAttribute('aria-selected', one === issue);
    button.onclick = () => { issue = one; by('sort').value = 'overview'; tabs(); filter(); };
    return button;
  }));
  by('why').textContent = issue.why;
  by('drawn').disabled = !draws[issue.id];
}

function options() {
  for (const [id, column] of [['given', D.given], ['suggested', D.suggested]]) {
    const present = [...new Set(column)].sort((a, b) => D.classes[a] < D.classes[b] ? -1 : 1);
    by(id).replaceChildren(...['', ...present].map(k => {
      const option = element('option', '', k === '' ? 'any' : D.classes[k]);
      option.value = k;
      return option;
    }));
  }
}

const orders = {
  overview: () => (a, b) => issue.place.get(a) - issue.place.get(b),
  score: () => (a, b) => (D.score[a] ?? 2) - (D.score[b] ?? 2) || a - b,
  class: () => (a, b) => D.classes[D.given[a]] < D.classes[D.given[b]] ? -1 : D.given[a] !== D.given[b] ? 1 : a - b,
  name: () => (a, b) => D.key[a] < D.key[b] ? -1 : D.key[a] > D.key[b] ? 1 : a - b,
  random: () => {
    const place = new Map((draws[issue.id] || []).map((index, k) => [cardOf.get(index), k]));
    return (a, b) => (place.get(a) ?? M) - (place.get(b) ?? M) || a - b;
  },
};

function filter() {
  const given = by('given').value, suggested = by('suggested').value, most = +by('most').value;
  const text = by('text').value.toLowerCase(), done = by('decided').value;
  if (text && !lower.length) for (const key of D.key) lower.push(key.toLowerCase());
  view = issue.cards.filter(card =>
    (given === '' || D.given[card] === +given) && (suggested === '' || D.suggested[card] === +suggested) &&
    (most >= 1 || D.score[card] !== null && D.score[card] <= most) && (!text || lower[card].includes(text)) &&
    (!done || (decisionOf(card) !== null) === (done === 'yes')));
  view.sort(orders[by('sort').value]());
  by('mostshown').textContent = most.toFixed(2);
  at = 0;
  draw();
}

function clearFilter() {
  for (const id of ['given', 'suggested', 'decided', 'text']) by(id).value = '';
  by('most').value = 1;
}

function random() {
  const taken = new Set(draws[issue.id] || []), left = issue.cards.filter(card => !taken.has(D.index[card]));
  const fresh = [];
  while (fresh.length < 50 && left.length) {
    const k = Math.floor(Math.random() * left.length);
    fresh.push(D.index[left[k]]);
    left[k] = left[left.length - 1];
    left.pop();
  }
  draws[issue.id] = [...(draws[issue.id] || []), ...fresh];
  save();
  clearFilter();
  by('drawn').disabled = false;
  by('sort').value = 'random';
  filter();
  const first = view.findIndex(card => decisionOf(card) === null);
  if (first > 0) focus(first);
  say(fresh.length + ' more are drawn and come first');
}

// -- cards ------------------------------------------------------------------------------------------

function picture(index) {
  const image = element('img');
  image.alt = unreadable.has(index) ? 'unreadable' : '';
  image.loading = 'lazy';
  image.onload = () => image.classList.toggle('tiny', Math.max(image.naturalWidth, image.naturalHeight) < 72);
  image.onerror = () => { image.alt = 'missing'; };
  if (D.pictures[index]) image.src = 'data:image/jpeg;base64,' + D.pictures[index];
  else if (D.folder && !unreadable.has(index)) image.src = D.folder + '/' + String(index).padStart(9, '0') + '.jpg';
  return image;
}

const shown = value => value === null ? 'unknown' : value.toFixed(2);

function reason(card) {
  if (issue.notes.length) return issue.notes[issue.place.get(card)];
  const given = D.classes[D.given[card]], suggested = D.classes[D.suggested[card]], near = D.near_label[card];
  let text = 'Confidence in “' + given + '” is ' + shown(D.score[card]);
  text += D.given[card] === D.suggested[card] ? ', and no other label is better' : ', in “' + suggested + '” ' + shown(D.suggested_score[card]);
  if (near.length) {
    const same = near.filter(k => k === D.suggested[card]).length;
    text += '; ' + same + ' of the ' + near.length + ' nearest trusted pictures ' + (same === 1 ? 'is' : 'are') + ' labelled “' + suggested + '”';
  }
  return text + '; doubted in ' + D.flagged[card] + (D.flagged[card] === 1 ? ' epoch.' : ' epochs.');
}

function drawCard(place) {
  const card = view[place], index = D.index[card], d = decisionOf(card);
  const whole = element('div', 'card' + (d ? ' ' + d[0] : '') + (place === at ? ' focused' : ''));
  whole.dataset.index = index;
  whole.onclick = () => focus(place);
  const top = element('div', 'top'), words = element('div'), labels = element('div', 'labels');
  if (D.given[card] === D.suggested[card]) labels.append(element('span', '', D.classes[D.given[card]]), ' doubted');
  else labels.append(element('i', '', D.classes[D.given[card]]), ' → ', element('b', '', D.classes[D.suggested[card]]));
  words.append(labels, element('div', 'scores', 'score ' + shown(D.score[card]) + ' → ' + shown(D.suggested_score[card])));
  if (D.true && D.true[card] >= 0) words.append(element('div', 'true', 'true: ' + D.classes[D.true[card]]));
  words.append(element('div', 'key', '#' + index + ' ' + D.key[card]));
  for (const one of D.issues) if (one !== issue && one.place.has(card)) words.append(element('span', 'tag', one.title));
  top.append(picture(index), words);
  const near = element('div', 'near');
  const kept = issue.partner.get(card);
  if (kept !== undefined) {
    const box = element('div');
    box.append(picture(kept), 'copy to keep');
    box.title = 'would be kept: #' + kept + ' ' + D.key[cardOf.get(kept)];
    near.append(box);
  } else D.near[card].forEach((other, k) => {
    const box = element('div'), name = D.classes[D.near_label[card][k]];
    box.append(picture(other), name);
    box.title = 'nearest trusted: ' + name + ' (#' + other + ')';
    near.append(box);
  });
  whole.append(top, element('div', 'reason', reason(card)));
  if (near.children.length) whole.append(near);
  whole.append(buttons(place, card, d));
  return whole;
}

function buttons(place, card, d) {
  const acts = element('div', 'acts'), other = d && d[0] === 'relabel' && d[1] !== D.suggested[card];
  const on = {keep: d && d[0] === 'keep', relabel: d && d[0] === 'relabel' && !other, other, drop: d && d[0] === 'drop'};
  for (const [name, text, act] of [
    ['keep', 'keep', () => decide('keep')], ['relabel', 'relabel', relabel],
    ['other', other ? 'to ' + D.classes[d[1]] : 'to other…', pick], ['drop', 'drop', () => decide('drop')],
  ]) {
    const button = element('button', name + (on[name] ? ' on' : ''));
    button.append(element('u', '', text[0]), text.slice(1));  // its key
    button.disabled = name === 'relabel' && D.given[card] === D.suggested[card];
    button.onclick = event => { event.stopPropagation(); focus(place); act(); };
    acts.append(button);
  }
  return acts;
}

function draw() {
  const first = Math.floor(at / PAGE) * PAGE, pages = Math.max(1, Math.ceil(view.length / PAGE));
  const cards = [];
  for (let place = first; place < Math.min(first + PAGE, view.length); place++) cards.push(drawCard(place));
  by('cards').replaceChildren(...cards);
  by('page').textContent = 'page ' + (first / PAGE + 1) + ' of ' + pages;
  by('before').disabled = first === 0;
  by('after').disabled = first + PAGE >= view.length;
  by('shown').textContent = view.length + ' of ' + issue.cards.length + ' pictures';
  count();
}

function count() {
  const n = issue.cards.reduce((sum, card) => sum + (decisionOf(card) !== null), 0);
  by('progress').textContent = n + ' of ' + issue.cards.length + ' decided';
  by('meter').style.width = 100 * n / Math.max(1, issue.cards.length) + '%';
  by('precision').textContent = precisionText(issue);
  by('undo').disabled = !undone.length;
}

function focus(place, scroll = true) {
  if (place < 0 || place >= view.length) return;
  const here = by('cards').children, turned = Math.floor(place / PAGE) !== Math.floor(at / PAGE);
  const before = at;
  at = place;
  if (turned) draw();
  else for (const changed of [before, at]) here[changed % PAGE].classList.toggle('focused', changed === at);
  if (scroll) here[at % PAGE].scrollIntoView({block: 'nearest'});
}

// -- decisions --------------------------------------------------------------------------------------

function nextUndecided() {
  for (let step = 1; step < view.length; step++) {
    const place = (at + step) % view.length;
    if (decisionOf(view[place]) === null) return focus(place);
  }
  if (view.length) say(decisionOf(view[at]) ? 'all cards in view are decided' : 'this is the only undecided card in view');
}

function redraw(place) {
  if (Math.floor(place / PAGE) === Math.floor(at / PAGE)) by('cards').children[place % PAGE].replaceWith(drawCard(place));
}

function decide(decision, label) {
  if (!view.length) return;
  const card = view[at], index = D.index[card];
  if (decision === 'relabel' && label === D.given[card]) decision = 'keep';
  undone.push([card, decided.get(index)]);
  decided.set(index, [decision, decision === 'relabel' ? label : D.given[card]]);
  say('#' + index + ': ' + decision + (decision === 'relabel' ? ' to ' + D.classes[label] : ''));
  save();
  redraw(at);
  count();
  nextUndecided();
}

function relabel() {
  if (!view.length) return;
  const card = view[at];
  if (D.given[card] === D.suggested[card]) say('No other label is suggested: press t to choose one, or k or d.');
  else decide('relabel', D.suggested[card]);
}

function undo() {
  const last = undone.pop();
  if (!last) return say('nothing to undo');
  const [card, before] = last, index = D.index[card];
  decided.set(index, before || ['', D.given[card]]);
  save();
  say('#' + index + ': undone');
  const place = view.indexOf(card);
  if (place >= 0) { focus(place); redraw(place); }
  count();
}

// -- the picker -------------------------------------------------------------------------------------

let choices = [], marked = 0;

function pick() {
  if (!view.length) return;
  by('picker').hidden = false;
  by('asked').replaceChildren(picture(D.index[view[at]]));
  by('part').value = '';
  match();
  by('part').focus();
}

function match() {
  const part = by('part').value.toLowerCase();
  const found = D.classes.map((name, k) => [name.toLowerCase().indexOf(part), k]).filter(([place]) => place >= 0);
  choices = found.sort((a, b) => a[0] - b[0] || a[1] - b[1]).slice(0, 10).map(([, k]) => k);
  const exact = D.classes.indexOf(by('part').value);
  if (exact >= 0) choices = [exact, ...choices.filter(k => k !== exact)];
  mark(0);
}

function mark(k) {
  marked = Math.max(0, Math.min(k, choices.length - 1));
  by('choices').replaceChildren(...choices.map((label, place) => {
    const item = element('li', place === marked ? 'on' : '', D.classes[label]);
    item.onclick = () => choose(label);
    return item;
  }));
}

function choose(label) {
  if (label === undefined) return;
  close();
  decide('relabel', label);
}

function close() {
  by('picker').hidden = by('keys').hidden = true;
  if (document.activeElement) document.activeElement.blur();
}

by('part').oninput = match;
by('part').onkeydown = event => {
  const act = {Enter: () => choose(choices[marked]), ArrowDown: () => mark(marked + 1), ArrowUp: () => mark(marked - 1)}[event.key];
  if (act) { event.preventDefault(); act(); }
};

// -- keys and buttons -------------------------------------------------------------------------------

function across() {
  return getComputedStyle(by('cards')).gridTemplateColumns.split(' ').length;
}

const keys = {
  k: () => decide('keep'), r: relabel, t: pick, d: () => decide('drop'), s: nextUndecided, u: undo,
  ArrowRight: () => focus(at + 1), ArrowLeft: () => focus(at - 1),
  ArrowDown: () => focus(Math.min(at + across(), view.length - 1)), ArrowUp: () => focus(at - across()),
  '?': () => { by('keys').hidden = false; },
};

document.addEventListener('keydown', event => {
  if (event.key === 'Escape') return close();
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (!by('keys').hidden) return close();
  const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) { event.preventDefault(); act(); }
});
for (const id of ['picker', 'keys']) by(id).onclick = event => { if (event.target === by(id)) close(); };
for (const id of ['sort', 'given', 'suggested', 'decided']) by(id).onchange = () => { by(id).blur(); filter(); };
for (const id of ['most', 'text']) by(id).oninput = filter;
by('most').onchange = () => by('most').blur();
for (const button of document.querySelectorAll('[data-class]')) button.onclick = () => {
  clearFilter();
  by('given').value = button.dataset.class;
  if (!by('given').value) return say('no card has this label');
  filter();
  by('tabs').scrollIntoView();
};
by('before').onclick = () => focus(Math.floor(at / PAGE) * PAGE - PAGE);
by('after').onclick = () => focus(Math.floor(at / PAGE) * PAGE + PAGE);
by('random').onclick = random;
by('undo').onclick = undo;
by('help').onclick = keys['?'];
by('csv').onclick = () => download(asCsv(), 'decisions.csv', 'text/csv');
by('json').onclick = () => download(asJson(), 'decisions.json', 'application/json');
by('import').onclick = () => by('file').click();
by('file').onchange = async () => {
  const file = by('file').files[0];
  if (!file) return;
  try { takeIn(await file.text()); } catch (error) { say(error.message); }
  by('file').value = '';
  draw();
};
window.addEventListener('storage', event => { if (event.key === STORE) { load(); draw(); } });  // another tab of this page

for (const one of D.issues) {
  one.place = new Map(one.cards.map((card, k) => [card, k]));
  one.partner = new Map(one.partners);
}
load();
tabs();
options();
filter();
