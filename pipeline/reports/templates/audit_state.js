'use strict';
// What was decided, and how it is kept: in this browser, in exported files. Names are text everywhere, never markup.
const by = id => document.getElementById(id);
const D = JSON.parse(by('data').textContent);
const M = D.index.length;
const cardOf = new Map(D.index.map((index, card) => [index, card]));
const classOf = new Map(D.classes.map((name, k) => [name, k]));
const unreadable = new Set(D.unreadable);
const STORE = 'evenhand-audit-' + D.store;
const COLUMNS = ['index', 'key', 'given', 'decision', 'label'];
const decided = new Map();  // by index: [decision, label]; '' as decision: taken back
const elsewhere = new Map();  // by index: [key, given] of decided samples that have no card
const undone = [];
let draws = {};  // by issue: indices drawn at random, in their order
let stored = true;

const decisionOf = card => { const d = decided.get(D.index[card]); return d && d[0] ? d : null; };

function preload() {
  for (const [index, key, given, decision, label] of D.decisions) {
    decided.set(index, [decision, label]);
    if (!cardOf.has(index)) elsewhere.set(index, [key, given]);
  }
}

function load() {
  decided.clear();
  preload();
  try {
    const kept = JSON.parse(localStorage.getItem(STORE) || '{}');
    for (const [index, decision, label] of kept.decided || []) decided.set(index, [decision, label]);
    for (const [index, key, given] of kept.elsewhere || []) elsewhere.set(index, [key, given]);
    draws = kept.draws || {};
  } catch (error) { stored = false; }
}

function save() {
  try {
    const rows = [...decided].map(([index, [decision, label]]) => [index, decision, label]);
    const others = [...elsewhere].map(([index, [key, given]]) => [index, key, given]);
    localStorage.setItem(STORE, JSON.stringify({decided: rows, elsewhere: others, draws}));
    stored = true;
  } catch (error) { stored = false; }
  if (!stored) say('This browser does not keep decisions: export them before you close the page.');
}

function say(text) { by('status').textContent = text; }

// -- files ----------------------------------------------------------------------------------------

function rows() {
  const out = [];
  for (const [index, [decision, label]] of [...decided].sort((a, b) => a[0] - b[0])) {
    const card = cardOf.get(index);
    if (!decision || card === undefined && !elsewhere.has(index)) continue;
    const [key, given] = card === undefined ? elsewhere.get(index) : [D.key[card], D.given[card]];
    out.push([index, key, D.classes[given], decision, decision === 'drop' ? '' : D.classes[label]]);
  }
  return out;
}

function asCsv() {
  const cell = value => /[",\r\n]|^\s|\s$/.test(value) ? '"' + String(value).replaceAll('"', '""') + '"' : String(value);
  return [COLUMNS, ...rows()].map(row => row.map(cell).join(',') + '\r\n').join('');
}

function asJson() {
  return JSON.stringify(rows().map(row => Object.fromEntries(row.map((value, k) => [COLUMNS[k], value]))), null, 1);
}

function download(text, name, type) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  say('exported ' + rows().length + ' decisions to ' + name);
}

function parseCsv(text) {
  const out = [];
  let row = [], cell = '', quoted = false;
  for (let k = 0; k < text.length; k++) {
    const sign = text[k];
    if (quoted) {
      if (sign !== '"') cell += sign;
      else if (text[k + 1] === '"') { cell += '"'; k++; }
      else quoted = false;
    } else if (sign === '"' && cell === '') quoted = true;
    else if (sign === ',') { row.push(cell); cell = ''; }
    else if (sign === '\n' || sign === '\r') {
      if (sign === '\r' && text[k + 1] === '\n') k++;
      row.push(cell); out.push(row); row = []; cell = '';
    } else cell += sign;
  }
  if (cell !== '' || row.length) { row.push(cell); out.push(row); }
  const head = out.shift() || [];
  return out.filter(line => line.some(Boolean)).map(line => Object.fromEntries(head.map((name, k) => [name, line[k] ?? ''])));
}

// All rows or none: a file that does not fit changes nothing.
function takeIn(text) {
  text = text.replace(/^\uFEFF/, '');
  let list;
  try { list = /^\s*[[]/.test(text) ? JSON.parse(text) : parseCsv(text); }
  catch (error) { throw new Error('This file is neither CSV nor JSON. Import a file that this page exported.'); }
  const fresh = [], seen = new Set();
  let other = 0;
  list.forEach((row, k) => {
    const at = 'Row ' + (k + 1) + ': ';
    if (!row || COLUMNS.some(name => row[name] === undefined)) throw new Error(at + 'it needs the columns ' + COLUMNS.join(', ') + '.');
    const index = +row.index, card = cardOf.get(index), given = classOf.get(row.given);
    if (row.index === '' || !Number.isInteger(index) || index < 0) throw new Error(at + 'the index is not a number.');
    if (!['keep', 'relabel', 'drop'].includes(row.decision)) throw new Error(at + 'the decision must be keep, relabel or drop.');
    if (given === undefined || card !== undefined && (D.given[card] !== given || D.key[card] !== row.key))
      throw new Error(at + 'sample ' + index + ' has another name or label here. The file belongs to other shards.');
    const label = row.decision === 'relabel' ? classOf.get(row.label) : given;
    if (label === undefined) throw new Error(at + 'there is no class ' + JSON.stringify(row.label) + '.');
    if (seen.has(index)) throw new Error(at + 'sample ' + index + ' is decided about twice. Delete one of the rows.');
    seen.add(index);
    fresh.push([index, card, row.key, given, row.decision, label]);
  });
  for (const [index, card, key, given, decision, label] of fresh) {
    if (card === undefined) { elsewhere.set(index, [key, given]); other++; }
    decided.set(index, [decision, label]);
  }
  undone.length = 0;
  save();
  say('imported ' + fresh.length + ' decisions' + (other ? '; ' + other + ' are about samples without a card here and stay in the export' : ''));
}

// -- precision from what was reviewed ---------------------------------------------------------------

function wilson(hits, n) {
  const z = 1.959964, p = hits / n, scale = 1 + z * z / n;
  const middle = (p + z * z / (2 * n)) / scale, half = z * Math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale;
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

function judged(cards) {
  let n = 0, hits = 0;
  for (const card of cards) {
    const d = decisionOf(card);
    if (d) { n++; hits += d[0] !== 'keep'; }
  }
  return [hits, n];
}

function precisionText(issue) {
  const percent = share => (100 * share).toFixed(0) + ' %';
  const share = (hits, n) => { const [low, high] = wilson(hits, n); return percent(hits / n) + ' (95 % interval ' + percent(low) + ' to ' + percent(high) + ')'; };
  const [hits, n] = judged(issue.cards);
  const drawn = (draws[issue.id] || []).map(index => cardOf.get(index)).filter(card => card !== undefined);
  const [lucky, m] = judged(drawn);
  let text = n ? 'Precision: of ' + n + ' decided cards ' + hits + ' were relabelled or dropped, ' + share(hits, n) + '. '
    : 'Precision: nothing is decided yet. ';
  if (drawn.length) text += 'Of the ' + drawn.length + ' drawn at random ' + m + ' are decided' + (m ? ': ' + share(lucky, m) : '') + '. The estimate is unbiased for those, if you decide all of them.';
  else text += 'The cards that you pick are not a fair sample; for 50 drawn at random the estimate is unbiased.';
  return text;
}
